"""All functional forms of the package with their pipes, whose modules this imports."""

from typing import Any

import torchdata_wds

functional_forms: dict[str, Any] = {form: getattr(torchdata_wds, name) for form, name in torchdata_wds._FORMS.items()}
