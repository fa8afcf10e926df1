"""`--task dino`: self-distillation."""
