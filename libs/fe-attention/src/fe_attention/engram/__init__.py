"""Operations of Engram layers."""
