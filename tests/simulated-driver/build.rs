//! Gives the shared library a name that no vendor has, and the places where it finds itself under
//! the vendors' names: so a test puts the names that it wants into its own process, see
//! `control::peerlane_sim_adopt`.

/// Where a copy of the library has its names, and where `harness::library_folder` puts those of the
/// library that cargo built.
const NAMES: &str = "$ORIGIN:$ORIGIN/simulated-driver/whole";

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libpeerlane_simulated_driver.so");
    // Searched before LD_LIBRARY_PATH, where another library of the name may be.
    println!("cargo::rustc-link-arg-cdylib=-Wl,--disable-new-dtags,-rpath,{NAMES}");
    println!("cargo::rerun-if-changed=build.rs");
}
