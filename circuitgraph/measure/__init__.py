"""Whether compiled programs are right (`verify`) and how fast they are (`bench`)."""
