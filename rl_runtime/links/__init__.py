"""How members reach the controller and their node's agent: questions that are asked again until they are answered."""
