"""FastDeploy's control interface over our engine: its routes and its settings."""
