"""What would this router have done with that traffic? A trace in virtual time against a simulated fleet: pure but for its last step."""
