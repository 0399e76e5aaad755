"""An MCP server with three tools for notes, over stdio; `mcp_tools.py` starts it.

It needs ``pip install "trio-rollout[mcp]"``.
"""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

NOTES = {
    "harbour": "The ferry to the island leaves at 9 and at 14.",
    "weather": "Fog in the morning, clear from 11 on.",
}

server = MCPServer("notes")


@server.tool()
def list_notes() -> list[str]:
    """List the names of all notes."""
    return sorted(NOTES)


@server.tool()
def read_note(name: str) -> str:
    """Read one note."""
    if name not in NOTES:
        raise ToolError(f"there is no note {name!r}, only: {', '.join(sorted(NOTES))}")
    return NOTES[name]


@server.tool()
def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


if __name__ == "__main__":
    server.run("stdio")
