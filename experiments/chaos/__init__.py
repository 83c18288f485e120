"""`atoll chaos`: disturbs a fleet that trains, and judges promise by promise what held."""
