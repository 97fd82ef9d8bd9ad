"""An ML service that accepts everything and does nothing, in a process of its own."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from subprocess import PIPE, Popen

import grpc


class _Handler(grpc.GenericRpcHandler):
    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        # Bytes in, an empty message out: an empty TrainBatchResponse accepts all rows.
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")


@contextmanager
def noop_service() -> Iterator[str]:
    """Run the service; gives its address."""
    with Popen([sys.executable, "-m", "benchmarks.noop_service"], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def main() -> None:
    """Serve until the parent goes away."""
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([_Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
