#!/bin/sh
# Device images are the same from any folder: none has a name that nvcc makes from the source's path, as it does for
# shared variables of static functions where an image holds PTX.
#   image_names.sh FOLDER
set -eu
failed=0 count=0
for image in "$1"/*.bin; do
    count=$((count + 1))
    if grep -q _INTERNAL_ "$image"; then
        echo "$image: $(strings "$image" | grep -o '_ZZ*N*[0-9]*_INTERNAL_[A-Za-z0-9_]*' | head -n 1)"
        failed=1
    fi
done
echo "$count images"
[ "$count" -gt 0 ] && exit "$failed"
