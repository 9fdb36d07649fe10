//! Gives the library HIP's name, so that a program that has loaded it has loaded HIP.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libamdhip64.so.7");
    println!("cargo::rerun-if-changed=build.rs");
}
