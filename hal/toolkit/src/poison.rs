//! Remembers the first error of an engine, which every later call returns.

/// Remembers the first error of an engine or a device, which later calls return. A backend's error
/// is therefore `Clone`.
#[derive(Debug)]
pub struct Poison<E>(Option<E>);

impl<E> Default for Poison<E> {
    fn default() -> Self {
        Self(None)
    }
}

impl<E: Clone> Poison<E> {
    /// Creates a `Poison` that holds no error.
    pub fn new() -> Self {
        Self::default()
    }

    /// Fails with the remembered error, if there was one.
    ///
    /// # Errors
    /// Returns the first error.
    pub fn check(&self) -> Result<(), E> {
        self.0.clone().map_or(Ok(()), Err)
    }

    /// Remembers the error of `result` if it is the first error, and returns `result`.
    ///
    /// # Errors
    /// Returns the error of `result`.
    pub fn keep<T>(&mut self, result: Result<T, E>) -> Result<T, E> {
        if let (Err(error), None) = (&result, &self.0) {
            self.0 = Some(error.clone());
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_stays() {
        let mut poison = Poison::new();
        assert_eq!(poison.check(), Ok(()));
        assert_eq!(poison.keep(Ok::<_, &str>(1)), Ok(1));
        assert_eq!(poison.keep(Err::<(), _>("first")), Err("first"));
        assert_eq!(poison.keep(Err::<(), _>("second")), Err("second"));
        assert_eq!(poison.check(), Err("first"));
    }
}
