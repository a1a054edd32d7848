"""The broker of a shared server: the only way from an account to the Docker Engine."""
