"""What runs inside the sandbox's own processes. Standard library only; started without the rest of the package."""
