//! The library in the place of HIP, over the simulated driver.

use std::sync::OnceLock;

use hip_sys::{Library, hipError_t};

/// The library that cargo built beside this program; who loads HIP by its name later gets it.
pub(crate) fn hip() -> &'static Library {
    static HIP: OnceLock<Library> = OnceLock::new();
    HIP.get_or_init(|| {
        peerlane_simulated_driver::install();
        let program = std::env::current_exe().unwrap();
        let folder = program.parent().unwrap();
        let name = "libpeerlane_hip_on_cuda.so";
        let places = [folder.join(name), folder.with_file_name(name)];
        let library = places.iter().find(|place| place.exists()).expect("cargo built it");
        Library::load_from(library).unwrap()
    })
}

pub(crate) fn done(code: hipError_t) {
    assert_eq!(code, hipError_t::hipSuccess);
}
