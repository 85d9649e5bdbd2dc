"""``feather-sglang top``: a live view of a running server, from what ``GET /feather/state`` says."""
