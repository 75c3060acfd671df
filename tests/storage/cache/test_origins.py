"""Where shards come from: by what the copies of one URL are told apart."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.storage import StorageOptions
from torchdata_wds.storage.cache.names import copy_name, origin_of

SECRET = "hunter2"
S3 = "s3://b/x.tar"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that sends nothing elsewhere."""
    for name in os.environ:
        if name.startswith(("AWS_", "AIS_", "AZURE_", "WDS_", "GOPEN_", "USE_AIS", "HF_", "STORAGE_", "FSSPEC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (S3, {}),
        (S3, {"s3": {"key": "k", "secret": SECRET, "token": "t", "anon": False, "profile": "p", "use_ssl": True}}),
        (S3, {"s3": {"client_kwargs": {"region_name": "eu", "verify": False}, "config_kwargs": {"proxies": {}}}}),
        (S3, {"gs": {"endpoint_url": "http://other"}}),
        ("https://me:pw@h/x.tar?token=1", {"https": {"headers": {"Authorization": SECRET}, "retries": 3}}),
        ("az://c/x.tar", {"az": {"account_key": SECRET, "sas_token": SECRET, "credential": SECRET}}),
        ("simplecache::s3://b/x.tar", {"simplecache": {"cache_storage": "/tmp/a"}}),
        ("pipe:curl -u me:pw https://h/x.tar", {}),
        ("x.tar", {}),
        ("memory://a/x.tar", {}),
    ],
)
def test_origin_of_is_the_url_when_nothing_sends_it_elsewhere(url: str, options: Any) -> None:
    """Credentials and ways of asking change nothing: copies that were made before are found."""
    origin = origin_of(url, StorageOptions(options, rewrite={"other://": "https://mirror/"}))
    assert origin == url
    assert copy_name(url, None, origin) == copy_name(url)
    assert copy_name(url, "unsigned", origin) == copy_name(url, "unsigned")


PLACES: list[tuple[str, dict[str, dict[str, Any]]]] = [
    (S3, {"s3": {"endpoint_url": "http://host"}}),
    (S3, {"s3": {"client_kwargs": {"endpoint_url": "http://host"}}}),
    ("s3a://b/x.tar", {"s3": {"endpoint_url": "http://host"}}),
    ("gs://b/x.tar", {"gcs": {"endpoint_url": "http://host"}}),
    ("az://c/x.tar", {"az": {"account_name": "host"}}),
    ("abfs://c/x.tar", {"az": {"account_host": "host"}}),
    ("az://c/x.tar", {"az": {"connection_string": f"AccountName=host;AccountKey={SECRET}"}}),
    ("hf://datasets/a/x.tar", {"hf": {"endpoint": "http://host"}}),
    ("github://x.tar", {"github": {"org": "host", "sha": "main"}}),
    ("webhdfs://a/x.tar", {"webhdfs": {"host": "host", "port": 1}}),
    ("https://h/x.tar", {"https": {"headers": {"Host": "host", "Authorization": SECRET}}}),
    ("simplecache::s3://b/x.tar", {"s3": {"endpoint_url": "http://host"}}),
    ("zip://x.tar::s3://b/x.zip", {"zip": {"target_options": {"endpoint_url": "http://host"}}}),
    (S3, {"s3": {"endpoint_url": f"http://me:{SECRET}@host"}}),
]


@pytest.mark.parametrize(("url", "options"), PLACES)
def test_origin_of_tells_places_apart_when_options_choose_them(url: str, options: Any) -> None:
    """Two hosts give two names, other credentials the same one, and none is shown."""
    one = origin_of(url, StorageOptions(options))
    text = repr(options)
    other = origin_of(url, StorageOptions(eval(text.replace("host'", "elsewhere'").replace("host;", "elsewhere;"))))
    assert len({url, one, other}) == 3
    assert len({copy_name(url, name, origin) for origin in (url, one, other) for name in (None, "unsigned")}) == 3
    assert origin_of(url, StorageOptions(eval(text.replace(SECRET, "changed")))) == one
    assert SECRET not in one


@pytest.mark.parametrize(
    ("url", "variable", "value"),
    [
        (S3, "AWS_ENDPOINT_URL", "http://host"),
        (S3, "AWS_ENDPOINT_URL_S3", "http://host"),
        ("gs://b/x.tar", "STORAGE_EMULATOR_HOST", "http://host"),
        ("az://c/x.tar", "AZURE_STORAGE_ACCOUNT_NAME", "me"),
        ("az://c/x.tar", "AZURE_STORAGE_CONNECTION_STRING", f"AccountName=me;AccountKey={SECRET}"),
        ("hf://datasets/a/x.tar", "HF_ENDPOINT", "http://host"),
        (S3, "WDS_REWRITE", "s3://=https://host/"),
        (S3, "GOPEN_REWRITE", "s3://=https://host/"),
        (S3, "USE_AIS_FOR", "s3"),
        ("ais://b/x.tar", "AIS_ENDPOINT", "http://host"),
    ],
)
def test_origin_of_tells_places_apart_when_the_environment_chooses_them(
    url: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the libraries of the stores read it."""
    before = origin_of(url, StorageOptions())
    monkeypatch.setenv(variable, value)
    after = origin_of(url, StorageOptions())
    assert copy_name(url, None, after) != copy_name(url, None, before)
    assert SECRET not in after


def test_origin_of_heeds_the_default_endpoint_and_what_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option goes before the environment, and the usual place is no other one."""
    monkeypatch.setenv("HF_ENDPOINT", "https://huggingface.co/")
    assert origin_of("hf://datasets/a/x.tar", StorageOptions()) == "hf://datasets/a/x.tar"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    chosen = StorageOptions({"s3": {"endpoint_url": "http://host"}})
    with_both = origin_of(S3, chosen)
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert origin_of(S3, StorageOptions()) == S3
    assert origin_of(S3, chosen) == with_both


def test_origin_of_reads_the_endpoint_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of the profile itself, or of its services; a damaged file tells nothing."""
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = a\n[profile one]\nendpoint_url = http://one/\n[profile two]\nservices = local\n"
        "[services local]\ns3 =\n  endpoint_url = http://two\n"
    )
    assert origin_of(S3, StorageOptions()) == S3
    assert "http://two" in origin_of(S3, StorageOptions({"s3": {"profile": "two"}}))
    monkeypatch.setenv("AWS_PROFILE", "one")
    assert origin_of(S3, StorageOptions()).endswith('"http://one"}}')
    config.write_text("endpoint_url")
    assert origin_of(S3, StorageOptions()) == S3


def test_origin_of_heeds_the_configuration_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options there are as good as those that are passed; an option that is passed goes first."""
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://host", "key": SECRET})
    assert origin_of(S3, StorageOptions()) == origin_of(S3, StorageOptions({"s3": {"endpoint_url": "http://host/"}}))
    assert "elsewhere" in origin_of(S3, StorageOptions({"s3": {"endpoint_url": "http://elsewhere"}}))
    assert origin_of("https://h/x.tar", StorageOptions()) == "https://h/x.tar"


def test_origin_of_is_the_place_without_credentials_when_urls_are_rewritten(tmp_path: Path) -> None:
    """The same for whoever asks; of local files it is the file."""
    for rule, place in {
        "https://host/a/": "https://host/a/b/x.tar",
        f"https://me:{SECRET}@host/a/": "https://host/a/b/x.tar",
        f"pipe:curl -u me:{SECRET} https://host/": "pipe:curl -u me:*** https://host/b/x.tar",
        f"{tmp_path}/": f"{tmp_path}/b/x.tar",
    }.items():
        assert origin_of(S3, StorageOptions(rewrite={"s3://": rule})) == place
    signed = origin_of(f"{S3}?X-Amz-Signature=1", StorageOptions(rewrite={"s3://": "https://host/"}))
    assert copy_name(S3, "unsigned", signed) == copy_name("https://host/b/x.tar")
    with pytest.raises(UnsafeDataError):
        origin_of("s3://b/$(x).tar", StorageOptions(rewrite={"s3://": "pipe:cat "}))


def test_copy_names_tell_endpoints_apart_when_urls_are_signed() -> None:
    """The endpoint stays where the last parameter of the query goes."""
    url = f"{S3}?versionId=1&X-Amz-Signature=abc"
    names = {
        copy_name(url, "unsigned", origin_of(url, StorageOptions({"s3": {"endpoint_url": f"http://{host}?a=1&b"}})))
        for host in ("one", "two")
    }
    assert len(names) == 2


@pytest.mark.slow
def test_origin_of_needs_no_client_library_to_be_imported() -> None:
    """Reading copies that are there costs no import of s3fs."""
    code = (
        "import sys; from torchdata_wds.storage import StorageOptions;"
        "from torchdata_wds.storage.cache.names import origin_of;"
        "origin_of('s3://b/x.tar', StorageOptions({'s3a': {'endpoint_url': 'http://host'}}));"
        "sys.exit(bool({'s3fs', 'aiobotocore'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
