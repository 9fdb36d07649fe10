//! Defines the Python class of hubs.

use std::sync::Mutex;

use peerlane::bootstrap::Secret;
use peerlane::bootstrap::tcp::{self, HubOptions};
use pyo3::prelude::*;

use crate::call::{
    drop_detached, drop_locked, lock, raised, short, take_owned, text, text_if_any, whole,
};

/// Converts the secret that all ranks of a hub have.
pub(crate) fn secret_of(text: Option<&str>) -> PyResult<Option<Secret>> {
    text.map(Secret::new).transpose().map_err(|error| raised(&error))
}

/// Serves the messages through which ranks find each other and agree.
#[pyclass(frozen)]
pub(crate) struct Hub {
    hub: Mutex<Option<tcp::Hub>>,
    /// The address at which ranks join.
    #[pyo3(get)]
    address: String,
}

impl Hub {
    /// Takes the hub for a group, unless it was closed or taken before.
    pub(crate) fn take(&self) -> Option<tcp::Hub> {
        lock(&self.hub).take()
    }
}

#[pymethods]
impl Hub {
    /// Opens a hub for `ranks` ranks at an address such as "127.0.0.1:0".
    #[new]
    #[pyo3(signature = (address, ranks, secret=None))]
    fn new(
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        ranks: &Bound<'_, PyAny>,
        secret: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let address = text("address", address)?;
        let ranks: usize = whole("ranks", ranks)?;
        let secret = text_if_any("secret", secret)?;

        let mut options = HubOptions::default();
        if let Some(secret) = secret_of(secret.as_deref())? {
            options = options.secret(secret);
        }

        let hub = short(py, || options.bind(&address, ranks))?;
        Ok(Self { address: hub.address().to_string(), hub: Mutex::new(Some(hub)) })
    }

    /// Closes the hub. The group that was opened through it ends.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop_locked(&self.hub));
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        drop_detached(take_owned(&mut self.hub));
    }
}
