//! Tests which kernels the driver accepts.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null;

use crate::api::{Answer, cuda, start, use_device};

/// Loads a module with one kernel of these parameters, and finds the kernel.
fn find(name: &str, parameters: &str, wanted: &CStr) -> Answer<usize> {
    let text = CString::new(format!(".visible .entry {name}({parameters})")).unwrap();
    let (mut module, mut function) = (0, 0);
    cuda!(cuModuleLoadDataEx(
        &mut module => &mut usize,
        text.as_ptr() => *const c_char,
        0 => u32,
        null() => *const i32,
        null() => *const *mut c_void
    ))?;
    cuda!(cuModuleGetFunction(
        &mut function => &mut usize,
        module => usize,
        wanted.as_ptr() => *const c_char
    ))?;
    Ok(function)
}

#[test]
fn only_reductions_are_found() {
    let _driver = start();
    use_device(0);
    let sources = ".param .align 8 .b8 reduce_sum_f32_param_1[1024]";
    assert!(find("reduce_sum_f32", sources, c"reduce_sum_f32").is_ok());
    assert_eq!(find("reduce_sum_f32", sources, c"reduce_max_f32"), Err(500));

    // Kernels of others: a launch would read parameters that they do not have.
    let other = ".param .u64 reduce_sum_f32_param_0";
    assert_eq!(find("reduce_sum_f32", other, c"reduce_sum_f32"), Err(801));
    assert_eq!(find("softmax", "", c"softmax"), Err(801));
}
