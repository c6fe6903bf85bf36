"""AMD's library, behind the operators that it has an answer for."""
