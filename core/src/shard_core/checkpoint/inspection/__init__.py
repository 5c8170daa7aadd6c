"""What a checkpoint holds, whether it is whole, and in what two differ, without a live state."""
