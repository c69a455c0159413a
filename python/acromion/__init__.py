"""acromion from Python: so far only what `acromion bench --peers` needs (acromion.bench)."""
