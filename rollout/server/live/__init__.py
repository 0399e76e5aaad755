"""What a server shows of itself while it runs: one streamed request for all its rollouts."""

from rollout.server.live.conversation import ConversationStream
from rollout.server.live.stream import LIVE_PATH, LiveStream
from rollout.server.live.view import LiveView

__all__ = ["LIVE_PATH", "ConversationStream", "LiveStream", "LiveView"]
