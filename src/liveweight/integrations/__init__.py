"""Other frameworks as sources and targets: one thin file each, which imports its host when it is used."""
