"""What a field holds, by its name alone, as the WebDataset builder of Hugging Face Datasets reads it."""

from typing import Literal

Kind = Literal["image", "audio", "video", "mesh", "text", "integer", "json", "other", "bytes"]

# The builder's own lists. Its "raw" is sound, "h5" an image; "mpeg" is in two lists, of which the later one counts.
_IMAGE = """
    apng blp bmp bufr bw cur dcx dds dib emf eps fit fits flc fli ftc ftu gbr gif grib h5 hdf icb icns ico iim im j2c
    j2k jfif jp2 jpc jpe jpeg jpf jpg jpx mpg msp pbm pcd pcx pgm png pnm ppm ps psd pxr ras rgb rgba sgi tga tif
    tiff vda vst webp wmf xbm xpm
"""
_AUDIO = """
    aiff au avr caf flac htk ircam mat4 mat5 mp3 mpc2k nist ogg opus paf pvf raw rf64 sd2 sds svx voc w64 wav wavex
    wve xi
"""
_KINDS: dict[Kind, str] = {
    "image": _IMAGE,
    "audio": _AUDIO,
    "video": "avi mkv mov mp4 mpeg",
    "mesh": "glb ply stl",
    "text": "text transcript txt",
    "integer": "cls cls2 id index inx",
    "json": "jsn json",
    "other": "cbor mp msg npy npz pth tb ten",  # decoded, to a type that only the content shows
}
_KIND_OF: dict[str, Kind] = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}
_COMPRESSED = frozenset({"bz2", "gz", "lz4", "xz", "zst"})

_MEDIA_TYPES = {
    "application/jsonlines": "jsonl",
    "application/pdf": "pdf",
    "audio/flac": "flac",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg opus",
    "audio/wav": "wav",
    "image/bmp": "bmp",
    "image/gif": "gif",
    "image/jpeg": "jpeg jpg",
    "image/png": "png",
    "image/svg+xml": "svg",
    "image/tiff": "tif tiff",
    "image/webp": "webp",
    "text/csv": "csv",
    "text/html": "html",
    "text/xml": "xml",
    "video/mp4": "mp4",
    "video/mpeg": "mpeg",
    "video/quicktime": "mov",
    "video/webm": "webm",
    "video/x-matroska": "mkv",
}
_MEDIA_TYPE_OF = {suffix: media for media, suffixes in _MEDIA_TYPES.items() for suffix in suffixes.split()}


def kind_of(field: str) -> Kind:
    """Returns what a field holds: that of its last suffix, or of the one before a suffix of compression.

    Example:
        >>> kind_of("seg.png"), kind_of("cls"), kind_of("json.gz"), kind_of("dat")
        ('image', 'integer', 'json', 'bytes')
    """
    inner, _, suffix = field.lower().rpartition(".")
    if is_compressed(field):
        kind = _KIND_OF.get(inner.rpartition(".")[2], "bytes")
        return kind if kind in ("text", "integer", "json", "other") else "bytes"
    return _KIND_OF.get(suffix, "bytes")


def is_compressed(field: str) -> bool:
    """Returns whether a field has a suffix of compression, as ``json.gz`` has."""
    inner, _, suffix = field.lower().rpartition(".")
    return bool(inner) and suffix in _COMPRESSED


def media_type(field: str) -> str:
    """Returns the MIME type of the content of a field.

    Example:
        >>> media_type("seg.png"), media_type("cls"), media_type("dat")
        ('image/png', 'text/plain', 'application/octet-stream')
    """
    suffix = field.lower().rpartition(".")[2]
    kind = _KIND_OF.get(suffix)
    if kind in ("text", "integer"):
        return "text/plain"
    return "application/json" if kind == "json" else _MEDIA_TYPE_OF.get(suffix, "application/octet-stream")
