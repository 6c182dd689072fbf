"""What several levels of tests share: clusters, and the objects they apply to them."""
