"""SGLang engines: what one server is started with, its process, the client that speaks its native protocol,
and traces of its scheduler."""
