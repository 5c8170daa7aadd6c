"""The promises of the conformance kit, one suite per noun."""
