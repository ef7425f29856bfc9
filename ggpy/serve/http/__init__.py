"""The HTTP side: bodies, access, server-sent events, and a bounded protocol."""
