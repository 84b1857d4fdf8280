"""Files and command lines written for OpenRLHF (its version 0.11), as they are."""
