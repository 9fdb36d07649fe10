"""The tests run on the host backend; each starts processes of its own."""
