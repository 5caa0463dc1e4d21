"""One model process for many client processes: calls cross a Unix socket, arrays shared memory."""
