"""One checkpoint for every strategy: full tensors cut into boxes, in safetensors files under one manifest."""
