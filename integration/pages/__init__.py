"""Tables and pictures of the documents, written from committed results and the package's facts."""
