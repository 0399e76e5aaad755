"""Which proxy stands between this process and a URL; never one before its own machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

__all__ = ["is_loopback", "proxy_for"]


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine itself."""
    host = _host(url)
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Connecting to 0.0.0.0 or :: reaches this machine too.
    return address.is_loopback or address.is_unspecified


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, ``None`` if the way is direct."""
    if is_loopback(url):
        return None
    proxies = getproxies()
    proxy = proxies.get(urlsplit(url).scheme) or proxies.get("all")
    return None if not proxy or proxy_bypass(_host(url)) else proxy


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "").rstrip(".")
