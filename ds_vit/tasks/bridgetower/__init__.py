"""`--task bridgetower`: contrastive training of one published cross-modal model."""
