"""How a training step calls the layers of its backbone, told without computing any of them (layer T)."""
