"""Weight sync: named weights on the device, bucket by bucket, wherever their bytes lie."""
