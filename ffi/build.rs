//! Gives the shared library its SONAME: the ABI's major version, KVR_ABI_MAJOR.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvrail.so.0");
}
