//! Gives the shared library the soname under which backends look for the vendor's driver, so that
//! a library that is loaded already is found whatever its file is called.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libcuda.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
