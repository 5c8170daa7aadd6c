"""Plain PyTorch, which random programs are held to: written from the contract, with nothing of the strategies."""
