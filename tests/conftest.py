"""Shape and type annotations are checked while the tests run."""

from jaxtyping import install_import_hook

install_import_hook("kvcat", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)
