# What `cpack -G DEB` packs (`./run deb`): a Debian package for each component of install.cmake. The same tree, compiler
# and SOURCE_DATE_EPOCH give the same bytes.
set(CPACK_PACKAGE_NAME acromion)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "the acromion authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "fused scaled-dot-product attention for NVIDIA GPUs and CPUs")
set(CPACK_COMPONENTS_ALL library development program)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON) # by dpkg-shlibdeps, from the symbols that the files want

set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libacromion0)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libacromion-dev)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME acromion)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_LIBRARY_DESCRIPTION "${CPACK_PACKAGE_DESCRIPTION_SUMMARY}
 The shared library: libacromion.so.0, which needs libc alone. On GPUs it loads
 the driver, R580 or newer, where there is one.")
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "${CPACK_PACKAGE_DESCRIPTION_SUMMARY}
 What programs are built with: acromion.h, the static library, and how CMake
 and pkg-config find them.")
set(CPACK_DEBIAN_PROGRAM_DESCRIPTION "${CPACK_PACKAGE_DESCRIPTION_SUMMARY}
 The program acromion, which checks, measures, profiles and evolves attention
 kernels, and the choices that were measured.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libacromion0 (= ${PROJECT_VERSION})")
if(ACR_CUDA)
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS libzstd-dev) # the static library's
endif()
set(CPACK_DEBIAN_LIBRARY_PACKAGE_GENERATE_SHLIBS ON)
# The linker's cache learns of the library.
file(WRITE ${CMAKE_BINARY_DIR}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${CMAKE_BINARY_DIR}/triggers)
set(packages libacromion0 libacromion-dev acromion)
foreach(component package IN ZIP_LISTS CPACK_COMPONENTS_ALL packages)
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} RENAME copyright COMPONENT ${component})
endforeach()
include(CPack)
