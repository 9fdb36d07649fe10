//! Loads and initialises the CUDA driver, once per process.

use std::sync::OnceLock;

use libloading::Library;

use crate::error::Error;
use crate::sys::{CUDA_SUCCESS, Driver, LIBRARY};

impl Driver {
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(Error::clone)
    }

    fn open() -> Result<Self, Error> {
        // SAFETY: loading the vendor's driver runs its initialisers, which every CUDA program does.
        let library = unsafe { Library::new(LIBRARY) }
            .map_err(|error| Error::library_missing(LIBRARY, &error))?;
        let driver = Self::look_up(library).map_err(|name| Error::symbol_missing(LIBRARY, name))?;
        // SAFETY: `cuInit` takes flags, which must be 0.
        let code = unsafe { (driver.init)(0) };
        if code == CUDA_SUCCESS { Ok(driver) } else { Err(Error::init_failed(&driver, code)) }
    }
}
