"""What stands on disk: the manifest, the index of chunks, and the safetensors files they name."""
