"""What schemathesis cannot know of the server: which URLs it takes."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies as st

from rollout.types._fields import url_host

schemathesis.openapi.format(
    "uri",
    st.builds(
        "{}://{}{}".format,
        st.sampled_from(["http", "https", "HTTP"]),
        st.sampled_from(["localhost", "127.0.0.1:8000", "[::1]:1", "user:pw@example.org", "a.b:0"]),
        st.sampled_from(["", "/v1", "/?k=v", "#x", "/%00"]) | st.text(max_size=5).map("/{}".format),
    ).filter(url_host),
)
