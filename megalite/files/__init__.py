"""Files and folders on the disk: written whole, and by one run at a time."""
