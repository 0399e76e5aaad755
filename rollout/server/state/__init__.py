"""The durable state of a server: what it keeps of rollouts beyond its process.

`rows` says what is kept and what a restart makes of it, `store` what a store can do, `journal`
writes many rows in one commit, and `sqlite` is the store of a real server.
"""

from rollout.server.state.journal import Journal
from rollout.server.state.rows import KeptRollout, Restored, ended_by_restart
from rollout.server.state.sqlite import DURABILITIES, Durability, SQLiteStore, is_held, read_state
from rollout.server.state.store import StateStore

__all__ = [
    "DURABILITIES",
    "Durability",
    "Journal",
    "KeptRollout",
    "Restored",
    "SQLiteStore",
    "StateStore",
    "ended_by_restart",
    "is_held",
    "read_state",
]
