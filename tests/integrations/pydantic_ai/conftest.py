"""The tests that all frameworks share explain their failures too."""

import pytest

pytest.register_assert_rewrite("integrations.framework_ends", "integrations.framework_samples")
