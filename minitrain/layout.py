"""What a layout is: sizes of the mesh axes and how each is used. Standard library only."""
