# What `cmake --install` lays down of the libraries: headers, shared and static library, and how other builds find them
# (pkg-config acromion, find_package(acromion)). The program and its man page: cli/CMakeLists.txt. An installed
# tree can be moved. Components: library (what programs need to run), development, program; a package each
# (packages.cmake).
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/acromion)

set_target_properties(acromion PROPERTIES EXPORT_NAME acromion)
set_target_properties(acromion_static PROPERTIES EXPORT_NAME static)
install(TARGETS acromion acromion_static EXPORT acromion_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(FILES include/acromion.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

# For several GPUs, beside it: acromion::nccl, -lacromion_nccl.
set_target_properties(acromion_nccl PROPERTIES EXPORT_NAME nccl INSTALL_RPATH $ORIGIN)
install(TARGETS acromion_nccl EXPORT acromion_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development)
install(FILES include/acromion_nccl.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

install(DIRECTORY wisdom DESTINATION ${CMAKE_INSTALL_DATADIR}/acromion COMPONENT program
  FILES_MATCHING PATTERN "*.wisdom")

install(EXPORT acromion_targets NAMESPACE acromion:: FILE acromion-targets.cmake DESTINATION ${package_dir}
  COMPONENT development)
configure_package_config_file(cmake/acromion-config.cmake.in ${CMAKE_BINARY_DIR}/acromion-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/acromion-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/acromion-config.cmake ${CMAKE_BINARY_DIR}/acromion-config-version.cmake
  DESTINATION ${package_dir} COMPONENT development)

# lib/pkgconfig/acromion.pc finds its prefix from its own place.
file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
if(ACR_CUDA)
  set(pc_zstd " -lzstd")
endif()
configure_file(cmake/acromion.pc.in ${CMAKE_BINARY_DIR}/acromion.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/acromion.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)
