"""An S3 server on the loopback address that can be made to misbehave."""

import contextlib
import threading
from collections.abc import Iterator

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    create_backend_app,
)
from pyarrow import fs
from werkzeug.serving import make_server

BUCKET, SECRET = "runs-of-tests", "a-secret-key"


class ObjectStore:
    """Moto's S3 server, which refuses requests or waits when it is told.

    Attributes:
        refuse: whether a request is answered with an error of the server.
        before: called with the number of each request that changes what is
            stored, before it is handled.
        changes: how many of these have come.
    """

    def __init__(self):
        self.app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.changes = 0
        self.quiet()

    def quiet(self):
        self.refuse = lambda: False
        self.before = lambda number: None

    def __call__(self, environ, start_response):
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            self.changes += 1
            self.before(self.changes)
        if not self.refuse():
            return self.app(environ, start_response)
        start_response("503 Slow Down", [("Content-Type", "text/xml")])
        return [b"<Error><Code>SlowDown</Code></Error>"]

    @property
    def uri(self):
        return (
            f"s3://key:{SECRET}@{BUCKET}/grids?region=us-east-1&scheme=http"
            f"&endpoint_override=127.0.0.1:{self.server.server_port}"
        )


@contextlib.contextmanager
def serving() -> Iterator[ObjectStore]:
    """A store that answers, with an empty bucket."""
    store = ObjectStore()
    threading.Thread(target=store.server.serve_forever, daemon=True).start()
    fs.S3FileSystem(
        access_key="key", secret_key=SECRET, region="us-east-1",
        scheme="http", allow_bucket_creation=True,
        endpoint_override=f"127.0.0.1:{store.server.server_port}",
    ).create_dir(BUCKET)  # fmt: skip
    try:
        yield store
    finally:
        store.server.shutdown()
