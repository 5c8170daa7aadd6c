"""What tests of strategies stand on: worlds of real ranks, an oracle in plain PyTorch, models to train."""
