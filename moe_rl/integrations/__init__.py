"""Engines that other people maintain, with routing record, replay and measurement added: TRL's trainer."""
