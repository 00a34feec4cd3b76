"""The commands that talk to the service, one small file each: `main(argv) -> int`."""
